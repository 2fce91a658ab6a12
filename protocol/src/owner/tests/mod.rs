//! The owner against requests made by hand.
