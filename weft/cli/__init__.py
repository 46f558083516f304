"""The command line: ``weft models | cluster | profile | plan | simulate | show | run | check | schedule | place``."""
