//! The product in a lab.
