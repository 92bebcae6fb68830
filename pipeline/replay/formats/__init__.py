"""The traces that people have, each read as what it says. `table` lists them; `sniff` tells them apart."""
