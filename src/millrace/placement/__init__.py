"""Who runs where: what a host has (`inventory`), what a run needs (`needs`), the decision (`assign`), and the
device that a role was given (`device`)."""
