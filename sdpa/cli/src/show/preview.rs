//! A preview in the terminal.

use super::field::{Field, Odd, range};

const COLUMNS: usize = 40;
/// From the smallest to the largest.
const RAMP: [char; 9] = ['.', ':', '-', '=', '+', '*', '#', '%', '@'];

/// Renders lines of characters: the larger the score, the darker; blank if no key is unmasked.
pub(super) fn render(field: &Field) -> String {
    let columns = field.columns.min(COLUMNS);
    // A character is twice as tall as it is wide, so halve the number of rows.
    let rows = (field.rows * columns / field.columns / 2).clamp(1, COLUMNS / 2).min(field.rows);
    let [low, high] = range(field.values.iter().flatten().copied()).unwrap_or([0.0, 0.0]);
    let span = |n: usize, of: usize, all: usize| n * all / of..((n + 1) * all / of).max(n * all / of + 1);
    let letter = |row: usize, column: usize| {
        let cells = || span(row, rows, field.rows).flat_map(|r| span(column, columns, field.columns).map(move |c| r * field.columns + c));
        // An infinity or NaN is shown even if only one pair of the cell has it.
        if let Some(odd) = cells().filter_map(|n| field.odd[n]).min() {
            return of_odd(odd);
        }
        let (count, sum) = cells().filter_map(|n| field.values[n]).fold((0u32, 0f64), |(count, sum), x| (count + 1, sum + x));
        if count == 0 {
            return ' ';
        }
        let part = if high > low { (sum / f64::from(count) - low) / (high - low) } else { 0.5 };
        RAMP[((part * RAMP.len() as f64) as usize).min(RAMP.len() - 1)]
    };
    let edge = format!("+{}+\n", "-".repeat(columns));
    let line = |row: usize| format!("|{}|\n", (0..columns).map(|column| letter(row, column)).collect::<String>());
    edge.clone() + &(0..rows).map(line).collect::<String>() + &edge
}

fn of_odd(odd: Odd) -> char {
    match odd {
        Odd::NotANumber => 'N',
        Odd::Infinite => '^',
        Odd::MinusInfinite => 'v',
    }
}

/// Returns the legend of the characters.
pub(super) fn legend(field: &Field) -> String {
    let there = Odd::ALL.into_iter().filter(|odd| field.odd_pairs[*odd as usize] > 0);
    let odd: String = there.map(|odd| format!("; {} is {}", of_odd(odd), odd.said())).collect();
    format!("{}{odd}", of_numbers(field))
}

fn of_numbers(field: &Field) -> String {
    match range(field.values.iter().flatten().copied()) {
        None if field.first_odd.is_some() => "no score that is kept is finite; blank is dropped".to_owned(),
        None => "no key is kept".to_owned(),
        Some([low, high]) if low == high => format!("{} is {}; blank is dropped", RAMP[RAMP.len() / 2], super::figure::short(low)),
        Some([low, high]) => {
            let short = super::figure::short;
            format!("{} is {}, {} is {}; blank is dropped", RAMP[0], short(low), RAMP[RAMP.len() - 1], short(high))
        }
    }
}
