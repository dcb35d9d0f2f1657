"""Front ends of the Jupyter world on the kernel ``lemon``: real servers, managers and clients on loopback."""
