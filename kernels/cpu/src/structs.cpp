// Sizes and offsets of the structures that Python mirrors with ctypes: load.py compares them when it loads the library.
#include <cstddef>
#include <string>

#include "head.h"
#include "layer.h"
#include "sample.h"

using namespace DIPTYCH_ISA;

namespace {

class Table {
 public:
  void add(const char *name, size_t offset, size_t size) {
    text += std::string(name) + ' ' + std::to_string(offset) + ' ' + std::to_string(size) + '\n';
  }
  std::string text;
};

// A structure's own line begins with "struct"; those of its fields follow.
#define STRUCT(type, fields) \
  {                          \
    using Own = type;        \
    table.add("struct " #type, 0, sizeof(Own)); \
    fields                   \
  }
#define FIELD(name) table.add(#name, offsetof(Own, name), sizeof(Own::name));

std::string structs() {
  Table table;
  STRUCT(WeightRows, FIELD(rows) FIELD(num_rows) FIELD(stride))
  STRUCT(Linear, FIELD(weight) FIELD(scales) FIELD(offsets) FIELD(table) FIELD(sums) FIELD(bias) FIELD(n) FIELD(k) FIELD(format) FIELD(is_gated) FIELD(group) FIELD(order) FIELD(at_once) FIELD(are_powers) FIELD(by_tiles))
  STRUCT(Draw, FIELD(temperature) FIELD(log_min_p) FIELD(top_p) FIELD(top_k) FIELD(key))
  STRUCT(Best, FIELD(logit) FIELD(id))
  STRUCT(Routing, FIELD(num_experts) FIELD(top_k) FIELD(num_groups) FIELD(top_groups) FIELD(bias) FIELD(is_sigmoid)
                      FIELD(renormalises) FIELD(groups_by_two) FIELD(scale))
  STRUCT(Cache, FIELD(base) FIELD(block_stride) FIELD(block_size) FIELD(num_kv_heads) FIELD(head_dim)
                    FIELD(format) FIELD(tail))
  STRUCT(Heads, FIELD(num_heads) FIELD(num_kv_heads) FIELD(head_dim) FIELD(scale) FIELD(softcap) FIELD(window)
                    FIELD(sinks))
  STRUCT(Sequences, FIELD(num_seqs) FIELD(table_stride) FIELD(block_tables) FIELD(context_lens) FIELD(query_starts)
                        FIELD(sparse) FIELD(tails) FIELD(tail_starts))
  STRUCT(Sparse, FIELD(num_seqs) FIELD(num_chosen) FIELD(block_size) FIELD(bounded) FIELD(chosen) FIELD(queries)
                     FIELD(scores) FIELD(score_stride))
  STRUCT(AttentionLimits, FIELD(num_seqs) FIELD(num_rows) FIELD(context_len))
  STRUCT(Rope, FIELD(table) FIELD(num_rotated))
  STRUCT(HeadNorms, FIELD(q) FIELD(k) FIELD(eps) FIELD(is_whole))
  STRUCT(Attention, FIELD(heads) FIELD(rope) FIELD(is_sparse))
  STRUCT(Experts, FIELD(gate_up) FIELD(down) FIELD(first) FIELD(count) FIELD(top_k) FIELD(hidden_size)
                      FIELD(inner_size) FIELD(gate) FIELD(alpha) FIELD(limit))
  STRUCT(ExpertRows, FIELD(num_rows) FIELD(weights) FIELD(ids) FIELD(starts) FIELD(rows) FIELD(places) FIELD(gathered)
                         FIELD(inner) FIELD(outputs) FIELD(gathered_stride) FIELD(inner_stride))
  STRUCT(Mixture, FIELD(router) FIELD(routing) FIELD(experts) FIELD(expert_tokens))
  STRUCT(Layer, FIELD(input_norm) FIELD(attention_out_norm) FIELD(mlp_norm) FIELD(mlp_out_norm) FIELD(q_norm)
                    FIELD(k_norm) FIELD(sinks) FIELD(qkv) FIELD(o) FIELD(gate_up) FIELD(down) FIELD(cache) FIELD(tail)
                        FIELD(attention) FIELD(gate) FIELD(mixture) FIELD(bounds))
  STRUCT(Decoder, FIELD(layers) FIELD(attentions) FIELD(norm) FIELD(embed) FIELD(head) FIELD(first_token)
                      FIELD(num_layers) FIELD(num_attentions) FIELD(hidden_size) FIELD(block_stride) FIELD(block_size)
                          FIELD(eps) FIELD(embed_scale) FIELD(logit_softcap) FIELD(dtype) FIELD(norms_whole_rows)
                              FIELD(is_split) FIELD(kv_format) FIELD(tail_stride))
  STRUCT(Taken, FIELD(rows) FIELD(stride) FIELD(columns) FIELD(norm))
  STRUCT(Step, FIELD(num_rows) FIELD(num_seqs) FIELD(token_ids) FIELD(num_new) FIELD(context_lens) FIELD(tables)
                   FIELD(table_rows) FIELD(table_width) FIELD(tails) FIELD(sampled) FIELD(num_sampled) FIELD(num_kept)
                       FIELD(query_starts)
                       FIELD(block_tables) FIELD(block_table_width) FIELD(positions) FIELD(slots) FIELD(tail_starts) FIELD(num_filled) FIELD(filled) FIELD(residual)
                           FIELD(normed) FIELD(qkv) FIELD(attended) FIELD(inner) FIELD(normed_stride)
                               FIELD(attended_stride) FIELD(inner_stride) FIELD(router_logits) FIELD(expert_rows)
                                   FIELD(partial) FIELD(scratches) FIELD(limits) FIELD(sparse) FIELD(logits) FIELD(picks) FIELD(masks)
                                       FIELD(ids) FIELD(bests) FIELD(few_logits) FIELD(nanoseconds)
                                           FIELD(taken))
  STRUCT(Head, FIELD(layers) FIELD(embed_norm) FIELD(hidden_norm) FIELD(fc) FIELD(joined) FIELD(to_target)
                   FIELD(norms_residual) FIELD(norms_output))
  STRUCT(Passes, FIELD(step) FIELD(token_ids) FIELD(num_new) FIELD(context_lens) FIELD(num_passes) FIELD(num_active)
                     FIELD(aux) FIELD(hidden) FIELD(wide) FIELD(wide_stride) FIELD(tallies) FIELD(ids) FIELD(chances))
  STRUCT(Tally, FIELD(logit) FIELD(mass) FIELD(id))
  return table.text;
}

}  // namespace

// Lines of "struct NAME 0 SIZE", each before those of its fields: "NAME OFFSET SIZE", in bytes.
extern "C" __attribute__((visibility("default"))) const char *diptych_structs() {
  static const std::string text = structs();
  return text.c_str();
}
