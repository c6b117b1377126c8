"""Groups that a short round leaves behind (`schedule.tail.rounds`)."""
