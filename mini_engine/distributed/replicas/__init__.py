"""Lesson 13. Several engines behind one server, each a replica that Ray Serve keeps running."""
