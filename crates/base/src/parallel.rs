//! Runs work on several threads.

use std::{
    convert::Infallible,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

/// The results of `work`, in the order of the items, from up to `jobs` threads.
///
/// A thread takes the next item when it is free, so at most `jobs` items are in memory at a time. With one job, the work
/// runs on the calling thread.
pub fn parallel_map<T: Sync, R: Send>(items: &[T], jobs: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if jobs.min(items.len()) <= 1 {
        return items.iter().map(work).collect();
    }
    let mut results = Vec::with_capacity(items.len());
    let Ok(()) = parallel_for_each(items, jobs, &AtomicBool::new(false), work, |number, result| {
        results.push((number, result));
        Ok::<(), Infallible>(())
    });
    results.sort_unstable_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Like [`parallel_map`], but calls `listener` on the calling thread with every result as soon as it is there, and with
/// the number of its item. Results arrive in any order.
///
/// No further item is started after `stop` is set or after the listener returned an error.
pub fn parallel_for_each<T: Sync, R: Send, E>(
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
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(number) else { break };
                    // The receiver is gone after an error of the listener.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_the_items() {
        for count in [50, 100] {
            let items: Vec<u64> = (0..count).collect();
            let doubled: Vec<u64> = items.iter().map(|item| item * 2).collect();
            for jobs in [0, 1, 3, 100, 200] {
                assert_eq!(parallel_map(&items, jobs, |item| item * 2), doubled);
            }
        }
        assert_eq!(parallel_map(&[], 4, |item: &u64| *item), [0; 0]);
    }

    #[test]
    fn results_arrive_with_their_number_until_stopped() {
        let items: Vec<usize> = (0..50).collect();
        for jobs in [0, 1, 3, 100] {
            let stop = AtomicBool::new(false);
            let mut received = Vec::new();
            let all = parallel_for_each(
                &items,
                jobs,
                &stop,
                |item| item * 2,
                |number, result| {
                    received.push((number, result));
                    Ok::<(), ()>(())
                },
            );
            received.sort_unstable();
            assert_eq!((all, received), (Ok(()), items.iter().map(|item| (*item, item * 2)).collect()));
        }
        let stop = AtomicBool::new(false);
        let stop_at_seven = |item: &usize| stop.store(*item >= 7, Ordering::Relaxed);
        let mut received = 0;
        parallel_for_each(&items, 1, &stop, stop_at_seven, |_, ()| {
            received += 1;
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(received, 8);
    }

    #[test]
    fn an_error_starts_no_further_items() {
        let items: Vec<usize> = (0..1000).collect();
        let begun = AtomicUsize::new(0);
        let work = |item: &usize| {
            begun.fetch_add(1, Ordering::Relaxed);
            thread::sleep(std::time::Duration::from_millis(1));
            *item
        };
        let refused = parallel_for_each(&items, 2, &AtomicBool::new(false), work, |_, item| Err(item));
        assert!(refused.is_err());
        assert!(begun.load(Ordering::Relaxed) < items.len(), "work continued after the error");
    }
}
