//! The one binary, `bluebridge`.

fn main() {}
