"""Lesson 10. Lesson 10's pools and its decode loop on the device, which the engine does not run."""
