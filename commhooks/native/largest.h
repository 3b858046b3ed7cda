/* The largest elements of blocks and of tiles, and the sums of what all ranks have sent of them, at one level.

   A block of n elements is arranged in lines, of which the maxima of all columns are found. If more than k columns have
   a maximum above a threshold, so have more than k elements, and all of the k largest stand in these columns. A
   threshold that few more than k exceed is found by counting; it is mostly that of the block before. Which elements are
   found does not depend on it. All searches end after at most as many counts as an integer has bits, and some more,
   whatever the elements are. `largest.py` says what the arguments are, and checks them. */

#define LINES 16

/* The arguments, as `largest.py` packs them. */

typedef struct {
    int64_t n, k;
    const float *blocks; /* [.., n] */
    int32_t *places;     /* [.., k] */
} Largest;

typedef struct {
    int64_t n, k;
    float *blocks;   /* [.., n] */
    float *residual; /* [.., n], or NULL */
    int32_t *places; /* [.., k] */
    float *values;   /* [.., k] */
    double least;
} Take;

/* A grid of tiles a×b over a matrix n×m, of which memory has the first `elements`; what is more is padding. */
typedef struct {
    int64_t a, b, across, n, m, down, right, elements, k;
} Grid;

typedef struct {
    Grid grid;
    const float *memory;
    int32_t *places; /* [.., k] */
} LargestOfTiles;

typedef struct {
    const float *values;
    int32_t *bins;
    float *means; /* [4] */
} Bins;

/* Of each rank, `total` numbers in runs of bytes (packing.py), of which those from `first` on count. */
typedef struct {
    const uint8_t *codes;
    int64_t rank, bits, total, first;
} Packed;

typedef struct {
    int64_t n, k;
    float *blocks; /* [.., n] */
    int64_t ranks;
    Packed places;
    const float *values; /* of each rank k for each block */
    int64_t values_rank;
} Sum;

typedef struct {
    Grid grid;
    float *memory;
    int64_t ranks;
    Packed places, bins;
    const float *means; /* of each rank 4 */
    int64_t means_rank;
} SumOfTiles;

typedef struct {
    int n, k, lines, width;
    int32_t *maxima, *columns;     /* [width] */
    int32_t *magnitudes, *places;  /* [n], of candidates */
    int32_t threshold;
} Search;

static int begin_search(Search *search, int n, int k) {
    int lines = LINES;
    while (lines > 1 && n / lines < 2 * k) lines /= 2;
    const int width = (n + lines - 1) / lines;
    int32_t *memory = malloc(((size_t)n + (size_t)width) * 2 * sizeof *memory);
    *search = (Search){n, k, lines, width, memory, memory + width, memory + 2 * width, memory + 2 * width + n, 1 << 29};
    return memory != NULL;
}

static void end_search(Search *search) { free(search->maxima); }

INLINE int32_t magnitude_of(float number) { return bits_of(number) & INT32_MAX; } /* NaN's are the largest */

INLINE int above(const int32_t *numbers, int n, int32_t threshold) {
    int count = 0;
    for (int j = 0; j < n; j++) count += numbers[j] > threshold;
    return count;
}

INLINE int32_t halfway(int32_t low, int32_t high) { return low + (int32_t)(((uint32_t)high - (uint32_t)low) / 2); }

/* Return a threshold, at least -1, which k columns' maxima exceed, and if possible few more. */
static int32_t threshold_of(const Search *search) {
    const int most = search->k + search->k / 4 + 8;
    int32_t low = -1, high = INT32_MAX, threshold = search->threshold; /* at least k exceed low, and fewer high */
    int64_t step = 1 << 18;
    while ((int64_t)high - low > 1) {
        if (threshold <= low || threshold >= high) threshold = halfway(low, high);
        const int count = above(search->maxima, search->width, threshold);
        if (count < search->k) {
            high = threshold;
        } else {
            low = threshold;
            if (count <= most) break;
        }
        const int64_t next = count < search->k ? threshold - step : threshold + step;
        step *= 2;
        threshold = next > low && next < high ? (int32_t)next : halfway(low, high);
    }
    return low;
}

/* Write the places of the k largest magnitudes of n elements x, those of equal ones in a fixed order. */
static void find_largest(Search *search, const float *x, int32_t *found) {
    const int n = search->n, k = search->k, width = search->width;
    int32_t *maxima = search->maxima, *columns = search->columns;
    for (int c = 0; c < width; c++) maxima[c] = magnitude_of(x[c]);
    for (int start = width; start < n; start += width) {
        const float *line = x + start;
        const int length = n - start < width ? n - start : width;
        INDEPENDENT
        for (int c = 0; c < length; c++) {
            const int32_t magnitude = magnitude_of(line[c]);
            maxima[c] = magnitude > maxima[c] ? magnitude : maxima[c];
        }
    }
    const int32_t threshold = search->threshold = threshold_of(search);

    int chosen = 0, candidates = 0;
    for (int c = 0; c < width; c++) {
        columns[chosen] = c;
        chosen += maxima[c] > threshold;
    }
    int32_t largest = 0;
    for (int i = 0; i < chosen; i++) {
        largest = maxima[columns[i]] > largest ? maxima[columns[i]] : largest;
        for (int place = columns[i]; place < n; place += width) {
            const int32_t magnitude = magnitude_of(x[place]);
            search->magnitudes[candidates] = magnitude;
            search->places[candidates] = place;
            candidates += magnitude > threshold;
        }
    }

    int32_t low = threshold, high = largest; /* at least k candidates exceed low, and fewer high */
    while ((int64_t)high - low > 1) {
        const int32_t between = halfway(low, high);
        if (above(search->magnitudes, candidates, between) < k)
            high = between;
        else
            low = between;
    }
    int equal = k - above(search->magnitudes, candidates, high);
    for (int i = 0, filled = 0; filled < k; i++) {
        const int32_t magnitude = search->magnitudes[i];
        if (magnitude > high || (magnitude == high && equal-- > 0)) found[filled++] = search->places[i];
    }
}

/* Find the places of the k largest elements of blocks, from `start` to `end`. */
int EXPORTED(largest)(int64_t start, int64_t end, const Largest *of) {
    Search search;
    if (!begin_search(&search, (int)of->n, (int)of->k)) return NO_MEMORY;
    for (int64_t i = start; i < end; i++) find_largest(&search, of->blocks + i * of->n, of->places + i * of->k);
    end_search(&search);
    return DONE;
}

/* Find the places and values of the k largest elements of blocks, from `start` to `end`; values below `least` are zeros.
   A residual is added first and becomes what the values leave out, and the blocks become what it was. */
int EXPORTED(take)(int64_t start, int64_t end, const Take *of) {
    const int64_t n = of->n, k = of->k;
    const float least = (float)of->least;
    Search search;
    if (!begin_search(&search, (int)n, (int)k)) return NO_MEMORY;
    for (int64_t i = start; i < end; i++) {
        float *x = of->blocks + i * n, *values = of->values + i * k;
        int32_t *places = of->places + i * k;
        if (of->residual) {
            float *sum = of->residual + i * n;
            add_state(sum, (int)n, x, x, sum);
            x = sum;
        }
        find_largest(&search, x, places);
        for (int64_t e = 0; e < k; e++) {
            const float value = x[places[e]];
            const int is_small = fabsf(value) < least; /* NaN is sent */
            values[e] = is_small ? 0.0f : value;
            if (of->residual && !is_small) x[places[e]] = 0.0f;
        }
    }
    end_search(&search);
    return DONE;
}

/* Return how many elements of row i of a tile are in memory, and where the first one is. */
INLINE int64_t row_of_tile(const Grid *grid, int64_t tile, int64_t i, int64_t *first) {
    const int64_t row = tile / grid->across * grid->a + i, column = tile % grid->across * grid->b;
    *first = row * grid->down + column * grid->right;
    int64_t length = grid->m - column < grid->b ? grid->m - column : grid->b;
    const int64_t to_end = (grid->elements - *first + grid->right - 1) / grid->right;
    length = to_end < length ? to_end : length;
    return row >= grid->n || length < 0 ? 0 : length;
}

/* Find the places of the k largest elements of each tile, from `start` to `end`. */
int EXPORTED(largest_of_tiles)(int64_t start, int64_t end, const LargestOfTiles *of) {
    const Grid *grid = &of->grid;
    const int64_t b = grid->b, right = grid->right;
    Search search;
    if (!begin_search(&search, (int)(grid->a * b), (int)grid->k)) return NO_MEMORY;
    float *tile = malloc((size_t)(grid->a * b) * sizeof *tile);
    for (int64_t t = start; tile && t < end; t++) {
        for (int64_t i = 0; i < grid->a; i++) {
            int64_t first;
            const int64_t length = row_of_tile(grid, t, i, &first);
            float *row = tile + i * b;
            if (right == 1)
                memcpy(row, of->memory + first, (size_t)length * sizeof *row);
            else
                for (int64_t j = 0; j < length; j++) row[j] = of->memory[first + j * right];
            memset(row + length, 0, (size_t)(b - length) * sizeof *row);
        }
        find_largest(&search, tile, of->places + t * grid->k);
    }
    end_search(&search);
    free(tile);
    return tile ? DONE : NO_MEMORY;
}

/* Write the bin of each of n values (1 if its magnitude is above the mean magnitude, plus 2 if it is negative), and the
   mean of each of the four bins, 0 of empty ones. Sums are in double, in order. */
int EXPORTED(bins)(int64_t start, int64_t end, const Bins *of) {
    const float *values = of->values;
    int32_t *bins = of->bins;
    double sum = 0.0, sums[4] = {0}, counts[4] = {0};
    for (int64_t i = start; i < end; i++) sum += fabs((double)values[i]);
    const float mean = (float)(sum / (double)(end - start));
    for (int64_t i = start; i < end; i++) {
        bins[i] = (fabsf(values[i]) > mean) + 2 * (values[i] < 0.0f);
        sums[bins[i]] += values[i];
        counts[bins[i]] += 1.0;
    }
    for (int bin = 0; bin < 4; bin++) of->means[bin] = (float)(sums[bin] / (counts[bin] > 0.0 ? counts[bin] : 1.0));
    return DONE;
}

/* Read k numbers of a rank, from number `first` + `from` on. */
static void read_numbers(const Packed *packed, int64_t rank, int64_t from, int64_t k, int32_t *numbers) {
    const uint8_t *bytes = packed->codes + rank * packed->rank;
    const int64_t first = packed->first + from;
    memset(numbers, 0, (size_t)k * sizeof *numbers);
    for (int shift = 0; shift < packed->bits;) {
        const int left = (int)packed->bits - shift, width = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const int64_t length = (packed->total * width + 7) / 8;
        int64_t position = first % length;
        int down = (int)(first / length) * width;
        for (int64_t done = 0; done < k;) {
            const int64_t span = length - position < k - done ? length - position : k - done;
            for (int64_t j = 0; j < span; j++)
                numbers[done + j] |= (bytes[position + j] >> down & ((1 << width) - 1)) << shift;
            done += span;
            position = 0;
            down += width;
        }
        bytes += length;
        shift += width;
    }
}

/* Overwrite blocks, from `start` to `end`, with the sums of values of all ranks, divided by W, in rank order. */
int EXPORTED(sum)(int64_t start, int64_t end, const Sum *of) {
    const int64_t n = of->n, k = of->k;
    const float ranks = (float)of->ranks;
    int32_t *places = malloc((size_t)k * sizeof *places);
    int done = places ? DONE : NO_MEMORY;
    for (int64_t i = start; done == DONE && i < end; i++) {
        float *x = of->blocks + i * n;
        memset(x, 0, (size_t)n * sizeof *x);
        for (int64_t rank = 0; rank < of->ranks; rank++) {
            const float *own = of->values + rank * of->values_rank + i * k;
            read_numbers(&of->places, rank, i * k, k, places);
            for (int64_t e = 0; e < k; e++) {
                if (places[e] < n)
                    x[places[e]] += own[e] / ranks;
                else
                    done = NO_SUCH_ROW;
            }
        }
    }
    free(places);
    return done;
}

/* Overwrite tiles, from `start` to `end`, with the sums, in rank order, of the means of the bins of their entries. */
int EXPORTED(sum_of_tiles)(int64_t start, int64_t end, const SumOfTiles *of) {
    const Grid *grid = &of->grid;
    const int64_t in_tile = grid->a * grid->b, k = grid->k, right = grid->right;
    float *tile = malloc((size_t)in_tile * sizeof *tile); /* its rows in memory may share a place in the cache */
    int32_t *places = malloc((size_t)k * 2 * sizeof *places), *bins = places ? places + k : NULL;
    int done = tile && places ? DONE : NO_MEMORY;
    for (int64_t t = start; done == DONE && t < end; t++) {
        memset(tile, 0, (size_t)in_tile * sizeof *tile);
        for (int64_t rank = 0; rank < of->ranks; rank++) {
            const float *means = of->means + rank * of->means_rank;
            read_numbers(&of->places, rank, t * k, k, places);
            read_numbers(&of->bins, rank, t * k, k, bins);
            for (int64_t e = 0; e < k; e++) {
                if (places[e] < in_tile)
                    tile[places[e]] += means[bins[e]];
                else
                    done = NO_SUCH_ROW;
            }
        }
        for (int64_t i = 0; i < grid->a; i++) {
            int64_t first;
            const int64_t length = row_of_tile(grid, t, i, &first);
            if (right == 1)
                memcpy(of->memory + first, tile + i * grid->b, (size_t)length * sizeof *tile);
            else
                for (int64_t j = 0; j < length; j++) of->memory[first + j * right] = tile[i * grid->b + j];
        }
    }
    free(tile);
    free(places);
    return done;
}
