"""JupyterLab on the kernel ``lemon`` in a real browser."""
