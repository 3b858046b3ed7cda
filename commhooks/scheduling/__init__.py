"""The order in which collectives are issued, the messages that they carry, and their statistics."""
