"""What compressors that send some of the elements share: choosing them, coding their indices, adding them up."""
