"""Lesson 10. Pools by slot and a decode loop on the device, which the engine does not run."""
