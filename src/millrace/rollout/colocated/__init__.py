"""A replica and engines where one device is lent in turns."""
