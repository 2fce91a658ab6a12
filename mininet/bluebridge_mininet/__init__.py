"""BlueBridge racks as Mininet topologies.

* ``daemon``: a process in a Mininet node, and when it counts as started.
* ``rack``: a rack of one switch; also a program.
"""
