//! Everything that loads neither cuDNN nor a driver into its process.

mod choice;
mod cli;
mod documentation;
mod facts;
mod hints;
mod house;
mod invariant;
mod ledger;
mod library;
mod lowering;
mod masks;
mod params;
mod property;
mod score_mod;
mod seq;
mod snapshots;
mod support;
mod words;
