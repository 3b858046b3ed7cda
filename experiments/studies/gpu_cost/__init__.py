"""What hooks would ask of a GPU, counted: launches, bytes and waits. Nothing here is measured on one."""
