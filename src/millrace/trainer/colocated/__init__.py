"""The trainer where one device is lent in turns."""
