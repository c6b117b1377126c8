"""The warm process, the warden of one program, and the program itself."""
