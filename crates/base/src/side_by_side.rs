//! Several things at once.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

/// What `work` makes of each item, in the order of the items, on up to `jobs` threads. An item is begun when a thread is
/// free, so that no more of them are at work, and in memory, than there are threads. Where one thread does, it is this one.
pub fn side_by_side<T: Sync, R: Send>(items: &[T], jobs: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let jobs = jobs.min(items.len());
    if jobs <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, R)>> = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((number, item)) = numbered(items, next.fetch_add(1, Ordering::Relaxed)) {
                    let result = work(item);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((number, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

/// The same for results that somebody waits for: `listener` is told of each on this thread as soon as there is one, with
/// its item's number, in no particular order. Once `stop` is set, or the listener has refused a result, no further item is
/// begun.
pub fn as_they_come<T: Sync, R: Send, E>(
    items: &[T],
    jobs: usize,
    stop: &AtomicBool,
    work: impl Fn(&T) -> R + Sync,
    mut listener: impl FnMut(usize, R) -> Result<(), E>,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..jobs.clamp(1, items.len().max(1)) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let Some((number, item)) = numbered(items, next.fetch_add(1, Ordering::Relaxed)) else { break };
                    // Who listens no more has met an error already.
                    if sender.send((number, work(item))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        receiver.into_iter().try_for_each(|(number, result)| listener(number, result))
    })
}

fn numbered<T>(items: &[T], number: usize) -> Option<(usize, &T)> {
    Some((number, items.get(number)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items_whoever_makes_them() {
        for count in [50, 100] {
            let items: Vec<u64> = (0..count).collect();
            let doubled: Vec<u64> = items.iter().map(|item| item * 2).collect();
            for jobs in [0, 1, 3, 100, 200] {
                assert_eq!(side_by_side(&items, jobs, |item| item * 2), doubled);
            }
        }
        assert_eq!(side_by_side(&[], 4, |item: &u64| *item), [0; 0]);
    }

    #[test]
    fn every_result_is_told_with_its_number_until_somebody_stops() {
        let items: Vec<usize> = (0..50).collect();
        for jobs in [0, 1, 3, 100] {
            let stop = AtomicBool::new(false);
            let mut told = Vec::new();
            let all = as_they_come(
                &items,
                jobs,
                &stop,
                |item| item * 2,
                |number, result| {
                    told.push((number, result));
                    Ok::<(), ()>(())
                },
            );
            told.sort_unstable();
            assert_eq!((all, told), (Ok(()), items.iter().map(|item| (*item, item * 2)).collect()));
        }
        let stop = AtomicBool::new(false);
        let stop_at_seven = |item: &usize| stop.store(*item >= 7, Ordering::Relaxed);
        let mut told = 0;
        as_they_come(&items, 1, &stop, stop_at_seven, |_, ()| {
            told += 1;
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(told, 8);
    }

    #[test]
    fn a_result_that_is_refused_keeps_the_rest_from_being_begun() {
        let items: Vec<usize> = (0..1000).collect();
        let begun = AtomicUsize::new(0);
        let work = |item: &usize| {
            begun.fetch_add(1, Ordering::Relaxed);
            thread::sleep(std::time::Duration::from_millis(1));
            *item
        };
        let refused = as_they_come(&items, 2, &AtomicBool::new(false), work, |_, item| Err(item));
        assert!(refused.is_err());
        assert!(begun.load(Ordering::Relaxed) < items.len(), "nobody waits for a thousand results in vain");
    }
}
