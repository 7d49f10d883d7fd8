//! Interpreter (stub).
