"""Lesson 18. One model over several processes (tensor parallel): each has its share of the heads and of K and V."""
