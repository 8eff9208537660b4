"""What travels between server and device: frames and their limits, transfers by chunks, payloads."""
