// What templates/_lib/wgmma_images.cuh does with addresses of image_tiles.cuh, on a CPU: copies
// of boxes and lines, products whose operands are read as matrix descriptors say, and stores.
#include <cstdint>
#include <vector>

#define IMAGES static inline
#include "image_tiles.cuh"

namespace {

using namespace images;

struct Given {
  const double* image;
  const double* filters;
  Geometry of;
  int halves, part, groups;
};

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
          halo->push_back(is_inside || of.is_line ? given.image[8 * from + c] : 0.0);
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

bool multiply(const Given& given, const std::vector<double>& halo, uint64_t left,
              const double* filters, uint64_t right, double* sums) {
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      const int64_t from = element(left, row, k);
      if (from >= int64_t(halo.size())) return false;
      for (int column = 0; column < given.part; ++column) {
        sums[row * given.part + column] += halo[from] * filters[element(right, column, k)];
      }
    }
  }
  return true;
}

}  // namespace

extern "C" const char* convolve(const double* image, const double* filters, double* out,
                                int* stored, const int64_t* numbers, int64_t count, int halves,
                                int part, int groups) {
  Given given = {image, filters, {}, halves, part, groups};
  for (int64_t i = 0; i < count; ++i) reinterpret_cast<int*>(&given.of)[i] = int(numbers[i]);
  const Geometry& of = given.of;
  std::vector<unsigned> pairs(kMostEntries);
  for (int which = 0; which < of.phases; ++which) {
    const Phase& phase = of.phase[which];
    for (int step = 0; step < phase.steps; ++step) {
      pairs.at(phase.table + step) = pair_entry(of, phase, step);
    }
  }
  std::vector<double> halo;
  for (unsigned index = 0; index < num_tiles(of); ++index) {
    const Tile tile = tile_of(of, index);
    if (!has_pixels(of, tile)) continue;
    const Phase& phase = of.phase[tile.phase];
    std::vector<double> totals(int64_t(groups) * 64 * part);
    for (int chunk = 0; phase.steps > 0 && chunk < of.planes / of.chunk; ++chunk) {
      if (!copy_halo(given, tile, chunk, &halo)) return "a pixel before the image";
      for (int done = 0; done < phase.steps; ++done) {
        if (done % phase.stage_steps >= kMostSteps) return "too many steps between sums";
        const int64_t step = filter_step(of, tile, chunk * phase.steps + done);
        const double* own = filters + step * halves * part * 16;
        for (int group = 0; group < groups; ++group) {
          int origin[3];
          group_origin(of, group, origin);
          for (int product = 0; product < (halves == 2 ? 3 : 1); ++product) {
            const unsigned low = product == 1 ? of.chunk * plane_pitch(of) : 0;
            const unsigned pixels = pixel_place(of, origin[0], origin[1], origin[2]) + low +
                                    pairs[phase.table + done];
            const uint64_t left = uint64_t(rows_pitch(of)) << 32 | pixels;
            const uint64_t right =
                matrix_descriptor(product == 2 ? part * 2 : 0, kFilterAlong, kFilterAcross);
            if (!multiply(given, halo, left, own, right, &totals[int64_t(group) * 64 * part])) {
              return "a pixel behind the halo";
            }
          }
        }
      }
    }
    const int64_t made = int64_t(of.made[0]) * of.made[1] * of.made[2];
    for (int i = 0; i < groups * 64 * part; ++i) {
      int origin[3];
      group_origin(of, i / (64 * part), origin);
      const int pixel = made_pixel(of, tile, origin, i / part % 64);
      const int column = tile.column_tile * part + i % part;
      if (pixel < 0 || column >= of.columns) continue;
      const int64_t to = (int64_t(tile.sample) * of.columns + column) * made + pixel;
      out[to] = totals[i];
      ++stored[to];
    }
  }
  return nullptr;
}
