"""Where rows of data sets lie: files, one Arrow file that all workers map, data sets of a hub."""
