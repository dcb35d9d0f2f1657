"""The script's side of the bridge: what is staged beside a script or a kernel and runs there."""
