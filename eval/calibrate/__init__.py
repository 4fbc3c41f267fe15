"""What heads need, and plans made of it: `vmonarch calibrate`."""
