"""What compressors that send some of the elements have in common: choosing them, coding their places, adding up."""
