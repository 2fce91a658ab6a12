"""BlueBridge racks as Mininet topologies.

* ``daemon``: a process in a Mininet node, and when it counts as started.
* ``ending``: how the programs end, with all that they started.
* ``rack``: a rack of one switch; also a program.
* ``spine``: racks behind a spine; also a program.
"""
