"""Several hosts on one machine: network namespaces with limited links, from a Weft cluster file; see docs/lab.md."""
