"""The experiments of the DDP paper (Li et al., VLDB 2020)."""
