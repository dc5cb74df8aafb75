"""From prompts to tokenised samples: readers, chat rendering, response regeneration, the sample data set."""
