// The BlueBridge pipeline for v1model targets (P4_16): memory pointers are IPv6 destinations, and these
// tables are the directory. The order of the checks is that of src/pipeline.rs; ids, names and sizes are
// those of src/declaration.rs, which a test compares with the compiled P4Info.

#include <core.p4>
#include <v1model.p4>

#include "program/headers.p4"
#include "program/parser.p4"
#include "program/ingress.p4"
#include "program/egress.p4"
#include "program/deparser.p4"

@pkginfo(name="bluebridge", version="3")
V1Switch(
    fabric_parser(),
    verify_nothing(),
    ingress(),
    egress(),
    compute_nothing(),
    fabric_deparser()
) main;
