"""FLOPs, time, memory and device peaks."""
