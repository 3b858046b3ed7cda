"""Exchanges: a feed's named tensors, averaged by engines, and the handle that a user has on them."""
