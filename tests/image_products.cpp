// What templates/_lib/wgmma_images.cuh and its parts do with addresses of image_tiles.cuh and
// image_sources.cuh, on a CPU: halves that are made, copies of boxes and lines, products whose
// operands are read as matrix descriptors say, and stores by way of shared memory.
#include <cstdint>
#include <cmath>
#include <numeric>
#include <vector>

#define IMAGES static inline
#include "image_tiles.cuh"
// Behind what it needs.
#include "image_sources.cuh"

namespace {

using namespace images;

struct Given {
  const double* x;  // halves of the image, and of filters, apart
  const double* w;
  Source from;
  Geometry of;
  Order order;
  int halves, part, groups;
  int64_t num_x, num_w;
  std::vector<double> image, steps;  // as the kernels that make halves store them
};

void make_halves(Given* given) {
  const Geometry& of = given->of;
  const Source& from = given->from;
  const unsigned count = padded_pixels(of);
  const Divider row = divider(of.padded[2]), rows = divider(of.padded[1]);
  const int own = from.size[0] * from.size[1] * from.size[2];
  for (int half = 0; half < given->halves; ++half) {
    for (int sample = 0; sample < of.samples; ++sample) {
      for (int plane = 0; plane < of.planes; ++plane) {
        for (unsigned pixel = 0; pixel < count; ++pixel) {
          const int place = source_pixel(from, row, rows, pixel);
          for (int c = 0; c < 8; ++c) {
            const bool is_own = place >= 0 && plane * 8 + c < from.channels;
            const int64_t channel = int64_t(sample) * from.channels + plane * 8 + c;
            given->image.at(image_place(of, half, sample, plane, pixel) * 8 + c) =
                is_own ? given->x[half * given->num_x + channel * own + place] : 0.0;
          }
        }
      }
    }
    const int num_rows = of.column_tiles * given->part;
    for (int which = 0; which < of.phases; ++which) {
      for (int column = 0; column < num_rows; ++column) {
        for (int unit = 0; unit < num_units(of, of.phase[which]); ++unit) {
          const Unit at = unit_of(from, of, which, unit);
          for (int c = 0; c < 8; ++c) {
            const bool is_own =
                at.place >= 0 && at.channel + c < from.channels && column < of.columns;
            const int64_t to =
                unit_target(of, given->halves, given->part, half, which, column, unit) * 8 + c;
            given->steps.at(to) = 0.0;
            if (is_own) {
              given->steps[to] = given->w[half * given->num_w +
                                          filter_number(from, of, column, at.channel + c, at.place)];
            }
          }
        }
      }
    }
  }
}

// A chunk of planes with the pixels around a tile, as the copy engine brings it.
bool copy_halo(const Given& given, const Tile& tile, int chunk, std::vector<double>* halo) {
  const Geometry& of = given.of;
  const int* base = of.phase[tile.phase].base;
  halo->clear();
  for (int half = 0; half < given.halves; ++half) {
    for (int plane = 0; plane < of.chunk; ++plane) {
      for (int i = 0; i < plane_pitch(of); ++i) {
        const int z = base[0] + tile.at[0] + i / (of.halo[1] * of.halo[2]);
        const int y = base[1] + tile.at[1] + i / of.halo[2] % of.halo[1];
        const int x = base[2] + tile.at[2] + i % of.halo[2];
        if (z < 0 || y < 0 || x < 0) return false;
        const bool is_inside = z < of.padded[0] && y < of.padded[1] && x < of.padded[2];
        int64_t from = (int64_t(half) * of.samples + tile.sample) * of.planes;
        from = (from + chunk * of.chunk + plane) * of.padded[0] + z;
        from = (from * of.padded[1] + y) * of.padded[2] + x;
        for (int c = 0; c < 8; ++c) {
          halo->push_back(is_inside || of.is_line ? given.image.at(8 * from + c) : 0.0);
        }
      }
    }
  }
  return true;
}

// Of an operand's 8 by 16 bytes after another: element k of a row, counted in elements.
int64_t element(uint64_t descriptor, int row, int k) {
  const int64_t start = descriptor & 0x3fff;
  const int64_t along = descriptor >> 16 & 0x3fff;
  const int64_t across = descriptor >> 32 & 0x3fff;
  return (start + across * (row / 8) + row % 8 + along * (k / 8)) * 8 + k % 8;
}

// 64 rows times some columns, which are added up by columns of the tile.
bool multiply(const Given& given, const std::vector<double>& halo, uint64_t left,
              const double* filters, uint64_t right, int columns, double* sums) {
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      const int64_t from = element(left, row, k);
      if (from >= int64_t(halo.size())) return false;
      for (int column = 0; column < columns; ++column) {
        sums[row * given.part + column % given.part] +=
            halo[from] * filters[element(right, column, k)];
      }
    }
  }
  return true;
}

// Sums of a phase and a chunk. Where a product is of both halves of the filters, its columns are
// twice as many.
const char* add_up(const Given& given, const std::vector<double>& halo,
                   const std::vector<unsigned>& pairs, const std::vector<double>& kept,
                   const Tile& tile, int which, int chunk, double* totals) {
  const Geometry& of = given.of;
  const Phase& phase = of.phase[which];
  const int step_size = given.halves * given.part * 16;
  for (int done = 0; done < phase.steps; ++done) {
    if (done % phase.stage_steps >= kMostSteps) return "too many steps between sums";
    const int64_t step =
        of.kept_steps > 0
            ? phase.kept + chunk * phase.steps + done
            : filter_step(of, which, tile.column_tile, chunk * phase.steps + done);
    const double* own = (of.kept_steps > 0 ? kept.data() : given.steps.data()) + step * step_size;
    for (int group = 0; group < given.groups; ++group) {
      int origin[3];
      group_origin(of, group, origin);
      for (int half = 0; half < given.halves; ++half) {
        const unsigned pixels = pixel_place(of, origin[0], origin[1], origin[2]) +
                                half * of.chunk * plane_pitch(of) +
                                pairs.at(pair_place(phase, done));
        const uint64_t left = uint64_t(rows_pitch(of)) << 32 | pixels;
        const int columns = half == 0 && given.halves == 2 ? 2 * given.part : given.part;
        if (!multiply(given, halo, left, own, matrix_descriptor(0, kFilterAlong, kFilterAcross),
                      columns, totals + int64_t(group) * 64 * given.part)) {
          return "a pixel behind the halo";
        }
      }
    }
  }
  return nullptr;
}

// As a warpgroup writes 64 rows.
template <bool kPaired, int kVector>
const char* store(const Given& given, const Tile& tile, int group, const double* const* totals,
                  double* out, int* stored) {
  const Geometry& of = given.of;
  constexpr int kPitch = Staged<kPaired>::kPitch;
  const int channels = given.part < Staged<kPaired>::kMostChannels
                           ? given.part
                           : Staged<kPaired>::kMostChannels;
  const int64_t made = int64_t(of.made[0]) * of.made[1] * of.made[2];
  int origin[3];
  group_origin(of, group, origin);
  for (int first = 0; first < given.part; first += channels) {
    std::vector<double> staged(channels * kPitch);
    for (int row = 0; row < 64; ++row) {
      for (int channel = 0; channel < channels; ++channel) {
        const int64_t from = (int64_t(group) * 64 + row) * given.part + first + channel;
        double* to = &staged[channel * kPitch + (kPaired ? 2 : 1) * row];
        to[0] = totals[kPaired ? even_phase(of, tile) : 0][from];
        if (kPaired) to[1] = totals[1 - even_phase(of, tile)][from];
      }
    }
    for (int thread = 0; thread < 128; ++thread) {
      const Share share = share_of<kPaired, kVector>(thread);
      const int pixel = made_pixel<kPaired>(of, tile, origin, share.pixel);
      if (pixel < 0) continue;
      if (pixel % kVector != 0) return "a vector that is not aligned";
      for (int channel = share.channel; channel < channels; channel += share.channels) {
        const int column = tile.column_tile * given.part + first + channel;
        if (column >= of.columns) continue;
        for (int i = 0; i < kVector; ++i) {
          const int64_t to = (int64_t(tile.sample) * of.columns + column) * made + pixel + i;
          out[to] = staged[channel * kPitch + share.pixel + i];
          ++stored[to];
        }
      }
    }
  }
  return nullptr;
}

template <bool kPaired>
const char* store_group(const Given& given, int vector, const Tile& tile, int group,
                        const double* const* totals, double* out, int* stored) {
  if (vector == 4) return store<kPaired, 4>(given, tile, group, totals, out, stored);
  if (vector == 2) return store<kPaired, 2>(given, tile, group, totals, out, stored);
  return store<kPaired, 1>(given, tile, group, totals, out, stored);
}

// What a block keeps of the filters.
std::vector<double> kept_filters(const Given& given, int column_tile) {
  const Geometry& of = given.of;
  const int size = given.halves * given.part * 16;
  std::vector<double> kept(int64_t(of.kept_steps) * size);
  for (int which = 0; which < of.phases && of.kept_steps > 0; ++which) {
    const Phase& phase = of.phase[which];
    const double* from = &given.steps.at(filter_step(of, which, column_tile, 0) * size);
    for (int i = 0; i < of.chunks * phase.steps * size; ++i) {
      kept.at(int64_t(phase.kept) * size + i) = from[i];
    }
  }
  return kept;
}

}  // namespace

// Whether each task comes once, and those that others wait for come before these.
extern "C" const char* check_tasks(int rows, int samples, int pieces, int parts, int64_t bytes) {
  const Tasks tasks = tasks_of(rows, samples, pieces, parts, bytes);
  if (num_tasks(tasks) != unsigned(rows + samples * (pieces + parts))) return "too many or few";
  std::vector<int> looked(samples), seen(rows + samples * (pieces + parts));
  for (unsigned i = 0; i < num_tasks(tasks); ++i) {
    const Task task = task_of(tasks, i);
    const int own = task.kind == Task::kFilter ? 0
                    : task.kind == Task::kPiece
                        ? rows + task.sample * pieces
                        : rows + samples * pieces + task.sample * parts;
    if (seen.at(own + task.index)++ > 0) return "a task twice";
    if (task.kind == Task::kPiece) ++looked.at(task.sample);
    if (task.kind == Task::kPart && looked.at(task.sample) < pieces) return "a part too soon";
  }
  return nullptr;
}

extern "C" const char* convolve(const double* x, const double* w, double* out, int* stored,
                                const int64_t* numbers, int64_t count, int64_t num_x,
                                int64_t num_w, int64_t num_image, int64_t num_steps, int halves,
                                int part, int groups, int places) {
  Given given = {x, w, {}, {}, {}, halves, part, groups, num_x, num_w, {}, {}};
  const int64_t own = sizeof(Source) / sizeof(int);
  for (int64_t i = 0; i < own; ++i) reinterpret_cast<int*>(&given.from)[i] = int(numbers[i]);
  for (int64_t i = own; i < count; ++i) {
    reinterpret_cast<int*>(&given.of)[i - own] = int(numbers[i]);
  }
  const Geometry& of = given.of;
  given.order = order_of(of);
  given.image.assign(num_image, std::nan(""));
  given.steps.assign(num_steps, std::nan(""));
  make_halves(&given);
  std::vector<unsigned> pairs(kMostEntries);
  for (int which = 0; which < of.phases; ++which) {
    const Phase& phase = of.phase[which];
    for (int step = 0; step < phase.steps; ++step) {
      pairs.at(pair_place(phase, step)) = pair_entry(of, phase, step);
    }
  }
  const int together = phases_together(of), vector = vector_of(of, 0);
  std::vector<double> halo;
  const unsigned blocks = blocks_of(of, num_tiles(of), places);
  for (unsigned index = 0; index < num_tiles(of); ++index) {
    // Each block's own tiles, by the filters that it kept before the first one.
    const Tile tile = tile_of(of, given.order, index);
    if (!has_pixels(of, tile)) continue;
    const std::vector<double> kept =
        kept_filters(given, tile_of(of, given.order, index % blocks).column_tile);
    std::vector<double> totals[2];
    const double* found[2] = {};
    for (int which = 0; which < together; ++which) {
      totals[which].assign(int64_t(groups) * 64 * part, 0.0);
      found[which] = totals[which].data();
    }
    for (int chunk = 0; has_steps(of, tile) && chunk < of.chunks; ++chunk) {
      if (!copy_halo(given, tile, chunk, &halo)) return "a pixel before the image";
      for (int which = 0; which < together; ++which) {
        const char* message = add_up(given, halo, pairs, kept, tile, tile.phase + which, chunk,
                                     totals[which].data());
        if (message != nullptr) return message;
      }
    }
    for (int group = 0; group < groups; ++group) {
      const char* message =
          of.is_paired ? store_group<true>(given, vector, tile, group, found, out, stored)
                       : store_group<false>(given, vector, tile, group, found, out, stored);
      if (message != nullptr) return message;
    }
  }
  return nullptr;
}
