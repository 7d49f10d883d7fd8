//! Printing (stub).
