"""A folder for PYTHONPATH: its `sitecustomize` gives every process that starts the virtual device."""
