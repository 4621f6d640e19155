# SGLang's own image of a release, with the patch queue applied to the SGLang in it:
#   docker build --build-arg SGLANG=0.5.23 -t sglang-xshare:0.5.23 .
# An image whose files are not the release's own, or of a release that is not supported, fails to build and says why.
ARG SGLANG=0.5.23
FROM lmsysorg/sglang:v${SGLANG}
COPY LICENSE /opt/sglang-xshare/LICENSE
COPY patches /opt/sglang-xshare/patches
COPY python /opt/sglang-xshare/python
COPY sgl-kernel/csrc /opt/sglang-xshare/sgl-kernel/csrc
RUN python3 -m pip install --no-cache-dir /opt/sglang-xshare/python \
    && sglang-xshare patch apply \
    && sglang-xshare patch status
