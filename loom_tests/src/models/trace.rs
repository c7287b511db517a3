//! What an exchange did before it gave its count back: a plain write, which loom holds against the read of whoever sees the
//! slot drained.

use loom::cell::UnsafeCell;
use loom::sync::Arc;

#[derive(Clone)]
pub struct Trace(Arc<UnsafeCell<bool>>);

// SAFETY: loom judges every access to the cell.
unsafe impl Send for Trace {}

impl Trace {
    pub fn new() -> Self {
        Self(Arc::new(UnsafeCell::new(false)))
    }

    pub fn leave(&self) {
        // SAFETY: loom judges the access.
        self.0.with_mut(|is_there| unsafe { *is_there = true });
    }

    pub fn is_there(&self) -> bool {
        // SAFETY: loom judges the access.
        self.0.with(|is_there| unsafe { *is_there })
    }
}
