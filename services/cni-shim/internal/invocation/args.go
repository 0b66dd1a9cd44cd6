// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"cmp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The keys of CNI_ARGS that the plugin knows.
const (
	argIgnoreUnknown = "IgnoreUnknown"
	argPodNamespace  = "K8S_POD_NAMESPACE"
	argPodName       = "K8S_POD_NAME"
	argPodUID        = "K8S_POD_UID"
	argSandbox       = "K8S_POD_INFRA_CONTAINER_ID"
)

// parseArgs parses CNI_ARGS: KEY=VALUE pairs separated by semicolons. Unknown keys are refused unless IgnoreUnknown is
// set, as CNI requires.
func parseArgs(s string) (map[string]string, error) {
	if len(s) > maxArgs {
		return nil, environment(EnvArgs, "is %d bytes long, the maximum is %d", len(s), maxArgs)
	}
	if !utf8.ValidString(s) || strings.IndexFunc(s, unicode.IsControl) >= 0 {
		return nil, environment(EnvArgs, "contains bytes that are not text")
	}
	args := map[string]string{}
	unknown := ""
	for pair := range strings.SplitSeq(s, ";") {
		if pair == "" { // "a=b;" is common
			continue
		}
		key, value, found := strings.Cut(pair, "=")
		if !found || key == "" {
			return nil, environment(EnvArgs, "%q is not KEY=VALUE", clip(pair))
		}
		if _, twice := args[key]; twice {
			return nil, environment(EnvArgs, "%q is given twice", clip(key))
		}
		args[key] = value
		switch key {
		case argIgnoreUnknown, argPodNamespace, argPodName, argPodUID, argSandbox:
		default:
			unknown = cmp.Or(unknown, key)
		}
	}
	ignore := false
	switch v := args[argIgnoreUnknown]; strings.ToLower(v) {
	case "1", "true":
		ignore = true
	case "", "0", "false":
	default:
		return nil, environment(EnvArgs, "%s: %q is neither true nor false", argIgnoreUnknown, clip(v))
	}
	if unknown != "" && !ignore {
		return nil, environment(EnvArgs, "unknown key %q (%s=1 would allow it)", clip(unknown), argIgnoreUnknown)
	}
	return args, nil
}
