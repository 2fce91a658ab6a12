//! Set-up, demo, test and bench as plain cargo commands.

fn main() {}
