// A model and its KV memory, and what one call does with them: a whole step.
// (Written by whoever writes the step.)
#pragma once
