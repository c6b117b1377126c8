"""The torch engine where one device is lent in turns."""
