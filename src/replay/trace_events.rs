//! The device's events that stand for those of a trace.

use crate::{base::EventId, trace::TraceEventId};

/// Which event of the device stands for which of the trace; each is made when it is first needed.
#[derive(Debug, Default)]
pub struct TraceEvents(Vec<Option<EventId>>);

impl TraceEvents {
    /// The device's event for `event`, made by `make` where there is none yet.
    pub fn get_or_make<E>(
        &mut self,
        event: TraceEventId,
        make: impl FnOnce() -> Result<EventId, E>,
    ) -> Result<EventId, E> {
        let place = event as usize;
        if place >= self.0.len() {
            self.0.resize(place + 1, None);
        }
        match self.0[place] {
            Some(event) => Ok(event),
            None => {
                let made = make()?;
                self.0[place] = Some(made);
                Ok(made)
            }
        }
    }

    /// Hands over all that were made, and knows none any more.
    pub fn take(&mut self) -> impl Iterator<Item = EventId> + use<> {
        std::mem::take(&mut self.0).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_made_once_and_one_that_could_not_be_made_is_tried_again() {
        let mut events = TraceEvents::default();
        assert_eq!(events.get_or_make(3, || Err("no")), Err("no"));
        assert_eq!(events.get_or_make(3, || Ok::<_, &str>(EventId(7))), Ok(EventId(7)));
        assert_eq!(events.get_or_make(3, || Err("made already")), Ok(EventId(7)));
        assert_eq!(events.take().collect::<Vec<_>>(), [EventId(7)]);
        assert_eq!(events.take().count(), 0);
    }
}
