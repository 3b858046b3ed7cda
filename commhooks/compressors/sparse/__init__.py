"""Common parts of compressors that send some of the elements: choosing them, coding their indices, adding them up."""
