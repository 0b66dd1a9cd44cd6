// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import (
	"fmt"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// nodeProbes is how other nodes answer to this one.
type nodeProbes struct {
	Nodes     uint32     `json:"nodes"`
	Answering uint32     `json:"answeringNodes"` // at each of their addresses
	Slowest   uint64     `json:"slowestUs"`
	Paths     []nodePath `json:"paths"` // those with a trouble first
}

// nodePath is the way to one address of another node and back.
type nodePath struct {
	Node      string     `json:"node"`
	Address   string     `json:"address"`
	State     string     `json:"state"`
	Since     *time.Time `json:"stateSince,omitempty"`
	Answered  *time.Time `json:"lastAnswer,omitempty"`
	Latency   uint64     `json:"latencyUs"`
	Smoothed  uint64     `json:"smoothedLatencyUs"`
	MTU       uint32     `json:"pathMtu"` // 0: not known
	Expected  uint32     `json:"expectedMtu"`
	Searching bool       `json:"searchingMtu"`
	Losses    uint32     `json:"losses"` // in a row
	Lost      uint32     `json:"recentLosses"`
	Asked     uint32     `json:"recentQuestions"`
	Trouble   string     `json:"trouble,omitempty"`
}

// probesOf is nil for a service that sends no probes.
func probesOf(m *datapathv1.NodeProbes) *nodeProbes {
	if m == nil {
		return nil
	}
	p := &nodeProbes{
		Nodes: m.GetNodes(), Answering: m.GetAnsweringNodes(), Slowest: m.GetSlowestUs(), Paths: []nodePath{},
	}
	for _, n := range m.GetPaths() {
		p.Paths = append(p.Paths, nodePath{
			Node: n.GetNode(), Address: n.GetAddress(), State: output.Enum(n.GetState(), "NODE_PATH_STATE_"),
			Since: output.When(n.GetStateSince()), Answered: output.When(n.GetLastAnswer()), Latency: n.GetLatencyUs(),
			Smoothed: n.GetSmoothedLatencyUs(), MTU: n.GetPathMtu(), Expected: n.GetExpectedMtu(),
			Searching: n.GetSearchingMtu(), Losses: n.GetLosses(), Lost: n.GetRecentLosses(), Asked: n.GetRecentQuestions(),
			Trouble: n.GetTrouble(),
		})
	}
	return p
}

// text says how many answer. Those that do not are warnings of the datapath.
func (p *nodeProbes) text() string {
	text := fmt.Sprintf("%d of %d other nodes answer", p.Answering, p.Nodes)
	if p.Slowest > 0 {
		digits := 1
		if p.Slowest < 100 {
			digits = 2
		}
		text += fmt.Sprintf(", slowest %.*f ms", digits, float64(p.Slowest)/1000)
	}
	return text
}
