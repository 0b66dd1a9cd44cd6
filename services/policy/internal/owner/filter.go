// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/labelfilter"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
)

// filterFile is the file with the last label filter of the identity service. It is needed at the next start, because
// the identity service may not run when the policies are compiled.
const filterFile = "label-filter.json"

// filterRecord is the content of filterFile.
type filterRecord struct {
	Workloads []labelfilter.Rule `json:"workloads"`
	Nodes     []labelfilter.Rule `json:"nodes"`
}

func (r filterRecord) filter() (excludedlabels.Filter, error) {
	workloads, err := labelfilter.New(r.Workloads)
	if err != nil {
		return excludedlabels.Filter{}, err
	}
	nodes, err := labelfilter.New(r.Nodes)
	return excludedlabels.Filter{Workloads: workloads, Nodes: nodes}, err
}

// loadFilter returns the filter of an earlier run, or the default before the first run.
func loadFilter(dir string, l *slog.Logger) (excludedlabels.Filter, error) {
	f := excludedlabels.Default()
	text, err := os.ReadFile(filepath.Join(dir, filterFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return f, err
	default:
		var r filterRecord
		if err = json.Unmarshal(text, &r); err == nil {
			f, err = r.filter()
		}
		// If the stored filter is lost, the default filter applies until the identity service sends its filter. If
		// the two differ, policies are stricter until then.
		if err != nil {
			l.Warn("cannot read the stored label filter; using the default",
				"file", filterFile, log.Err(err))
			f = excludedlabels.Default()
		}
	}
	return f, nil
}
