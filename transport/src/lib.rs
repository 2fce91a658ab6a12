//! Datagram carriers behind one small polled trait.
