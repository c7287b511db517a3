//! Memory of a request's state, which goes from one request to the next of its core.

use std::ops::{Deref, DerefMut};

use super::Exchange;

/// A place that has been left.
pub struct Empty(Box<Option<Exchange>>);

/// One that a request's state is in.
pub(super) struct Place(Box<Option<Exchange>>);

impl Place {
    /// Puts it into a place that another one has left, or a new one.
    pub(super) fn fill(left: Option<Empty>, exchange: Exchange) -> Place {
        let mut place = match left {
            Some(Empty(place)) => place,
            None => Box::new(None),
        };
        *place = Some(exchange);
        Place(place)
    }

    /// Drops the state, and all that it owns.
    pub(super) fn clear(mut self) -> Empty {
        *self.0 = None;
        Empty(self.0)
    }
}

const FILLED: &str = "a place is filled when it is made, and emptied by value";

impl Deref for Place {
    type Target = Exchange;

    fn deref(&self) -> &Exchange {
        self.0.as_ref().as_ref().expect(FILLED)
    }
}

impl DerefMut for Place {
    fn deref_mut(&mut self) -> &mut Exchange {
        self.0.as_mut().as_mut().expect(FILLED)
    }
}
