"""The work of hooks on a GPU, counted: launches, bytes and waits. Nothing here is measured on one."""
