"""The step-time model: one rank's processor and its link, the messages of compressors, rounds of DiLoCo, and FSDP2."""
